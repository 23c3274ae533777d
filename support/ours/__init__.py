"""What is not in the paper. Importing this folder adds its rows to METHODS, COMPRESSORS and
MEMORIES. A file of your own stands beside these, and is named here.

To read: forgetting and official_code; ceiling, bits and budgets, each of which is a subclass of
the one before; then learned_score and published, which are subclasses of BudgetMemory."""

from support.ours import budgets, forgetting, learned_score, official_code, published
