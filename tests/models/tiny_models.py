"""Small architectures with random weights, each written as the bare config.json that a user could have."""

from pathlib import Path

from transformers import (
    AlbertConfig,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    RobertaConfig,
    T5Config,
)

from budgetdb.models.spec import ModelSpec

BERT = {
    "vocab_size": 120,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
}
LLAMA = BERT | {"num_key_value_heads": 2, "pad_token_id": 0}
GPT2 = {
    "vocab_size": 120,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 40,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
T5 = {"vocab_size": 120, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}

# name: configuration class, its arguments, architecture
TINY: dict[str, tuple[type[PretrainedConfig], dict[str, object], str]] = {
    "bert": (BertConfig, BERT, "BertModel"),
    "bert-masked-lm": (BertConfig, BERT, "BertForMaskedLM"),
    "bert-classes": (BertConfig, BERT | {"num_labels": 3}, "BertForSequenceClassification"),
    "bert-regression": (BertConfig, BERT | {"num_labels": 1}, "BertForSequenceClassification"),
    "bert-multi-label": (
        BertConfig,
        BERT | {"num_labels": 5, "problem_type": "multi_label_classification"},
        "BertForSequenceClassification",
    ),
    "bert-tokens": (BertConfig, BERT | {"num_labels": 7}, "BertForTokenClassification"),
    "bert-answers": (BertConfig, BERT, "BertForQuestionAnswering"),
    "roberta": (RobertaConfig, BERT, "RobertaModel"),
    "roberta-masked-lm": (RobertaConfig, BERT, "RobertaForMaskedLM"),
    "albert": (AlbertConfig, BERT | {"embedding_size": 16}, "AlbertModel"),
    "llama": (LlamaConfig, LLAMA, "LlamaForCausalLM"),
    "llama-classes": (LlamaConfig, LLAMA | {"num_labels": 3}, "LlamaForSequenceClassification"),
    "gpt2": (GPT2Config, GPT2, "GPT2LMHeadModel"),
    "gpt2-classes": (GPT2Config, GPT2, "GPT2ForSequenceClassification"),
    "t5": (T5Config, T5, "T5ForConditionalGeneration"),
    "t5-base": (T5Config, T5, "T5Model"),
    "t5-encoder": (T5Config, T5, "T5EncoderModel"),
    "t5-classes": (T5Config, T5 | {"num_labels": 3}, "T5ForSequenceClassification"),
    "t5-answers": (T5Config, T5, "T5ForQuestionAnswering"),
    "mixtral": (MixtralConfig, LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2}, "MixtralForCausalLM"),
}
WITHOUT_LOSS = ("bert", "roberta", "albert", "t5-base", "t5-encoder")


def tiny_config(name: str, **changes: object) -> PretrainedConfig:
    config_class, arguments, architecture = TINY[name]
    return config_class(**(arguments | {"architectures": [architecture]} | changes))


def tiny_spec(name: str, directory: Path, **options: object) -> ModelSpec:
    tiny_config(name).save_pretrained(directory)
    return ModelSpec(source=str(directory / "config.json"), **options)
