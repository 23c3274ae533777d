"""What is not in the paper. Importing this folder adds its rows to METHODS, COMPRESSORS and
MEMORIES. A file of your own stands beside these, and is named here."""

from support.ours import budgets, forgetting, learned_score, official_code, published
