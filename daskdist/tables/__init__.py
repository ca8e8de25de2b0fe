"""Elements as tables and back: Arrow, pandas, and named columns."""
