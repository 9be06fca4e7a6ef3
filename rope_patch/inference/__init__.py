"""Inference for measurements: prefix sharing, samples, their scores, and stored answers."""

from rope_patch.utils.lazy_exports import export_lazily

export_lazily(
    __name__,
    {
        "answers": "answer_key AnswerStore",
        "decoding": "CacheBatch GreedyDecoder token_bytes",
        "prefix_reader": "is_out_of_memory PrefixReader",
        "samples": (
            "document_samples from_labelled_tensors needle_samples permuted_answers "
            "read_samples recall_samples Sample samples_digest"
        ),
    },
)
