"""Recovery from lost workers: replicas continue on others, and calls that failed are made again."""
