"""Inference for measurements: prefix sharing, samples, their scores, and stored answers."""

from rope_patch.utils.front import front

front(
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
