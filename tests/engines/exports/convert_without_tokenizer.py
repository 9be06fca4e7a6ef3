"""Run llama.cpp's converter on a checkpoint without a tokenizer: words stand for token ids.

Arguments: the converter's folder, and the converter's own.
"""

import sys


def add_words(model):
    """Add a vocabulary in place of the tokenizer's."""
    size, writer = model.hparams["vocab_size"], model.gguf_writer
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"<{i}>" for i in range(size)])
    writer.add_token_scores([0.0] * size)
    writer.add_token_types([1] * size)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)


def main():
    """Convert."""
    sys.path.insert(0, sys.argv.pop(1))
    import convert_hf_to_gguf

    find_class = convert_hf_to_gguf.get_model_class

    def without_tokenizer(*args, **keywords):
        model_class = find_class(*args, **keywords)
        model_class.set_vocab = add_words
        return model_class

    convert_hf_to_gguf.get_model_class = without_tokenizer
    convert_hf_to_gguf.main()


if __name__ == "__main__":
    main()
