"""Inference for measurements: prefix sharing, samples, their scores, and stored answers."""

from rope_patch.utils.front import front

front(
    __name__,
    {
        "answers": "AnswerStore answer_key",
        "cache_batch": "CacheBatch token_bytes",
        "greedy_decoder": "GreedyDecoder",
        "prefix_reader": "PrefixReader is_out_of_memory",
        "samples": "Sample document_samples from_labelled_tensors needle_samples permuted_answers "
        "read_samples recall_samples samples_digest",
    },
)
