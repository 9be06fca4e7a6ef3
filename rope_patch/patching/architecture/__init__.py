"""Find out how a model rotates, from its modules and their code, and set its frequencies."""
