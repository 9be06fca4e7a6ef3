"""The results of runs, with their statistics, as the report reads them."""
