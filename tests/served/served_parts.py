"""What the tests ask a server and the same model in this process."""

# Answers that are written, likelihoods, choices, documents, short questions.
PARTS = {
    "tasks": (
        *("rp_recall", "rp_recall_ll", "rp_recall_mc", "rp_nonliteral"),
        *("perplexity", "rp_short_cloze"),
    ),
    "lengths": (336, 448),
    "control_context": 128,
}
