"""What several rooms of tests share: tiny models, commands, processes, fixtures."""
