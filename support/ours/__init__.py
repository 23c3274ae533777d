"""What is not in the paper. Importing this folder adds its rows to METHODS, COMPRESSORS and
MEMORIES. A file of your own stands beside these, and is named here.

To read: forgetting and official_code; then ceiling, bits and budgets, where each memory is a
subclass of the one before; then learned_score and published, whose memories are subclasses of
BudgetMemory."""

from support.ours import budgets, forgetting, learned_score, official_code, published
