"""The lab's report, on the templates of the evaluation's."""
