"""llama.cpp's flags for a rotation, as its parser (common/arg.cpp) reads them."""

_FLAGS = {  # the parameter that each sets
    "-c": ("n_ctx", int),
    "--rope-scaling": ("rope_scaling_type", str),
    "--rope-scale": ("rope_freq_scale", lambda word: 1 / float(word)),
    "--rope-freq-base": ("rope_freq_base", float),
    "--yarn-orig-ctx": ("yarn_orig_ctx", int),
    "--yarn-ext-factor": ("yarn_ext_factor", float),
    "--yarn-attn-factor": ("yarn_attn_factor", float),
    "--yarn-beta-fast": ("yarn_beta_fast", float),
    "--yarn-beta-slow": ("yarn_beta_slow", float),
}


def read_flags(words):
    """Return the parameters that a command line sets, and the keys of the file that it overrides.

    Args:
        words: What export prints.
    """
    parameters, overridden_keys = {}, []
    for name, word in zip(words[::2], words[1::2], strict=True):
        if name == "--override-kv":  # the wheel has no parameter for it
            overridden_keys.append(word)
        else:
            parameter, read = _FLAGS[name]
            parameters[parameter] = read(word)
    return parameters, overridden_keys
