"""Write `profiles/schema.json`, the JSON Schema of files of profiles, from the models that read them."""

import json
from pathlib import Path

from budgetdb.store.exchange import json_schema

TARGET = Path(__file__).parents[1] / "profiles" / "schema.json"

if __name__ == "__main__":
    TARGET.write_text(json.dumps(json_schema(), indent=1) + "\n", encoding="utf-8")
    print(TARGET)
