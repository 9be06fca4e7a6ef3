"""The report on an evaluation: its statistics, tables, figures and pages."""
