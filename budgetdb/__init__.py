"""budgetdb finds, once per kind of GPU, how many tokens a model takes in one step, and batches by it ever after."""
