"""A proof that patches are right on the running transformers, made on a tiny model of a class.

In goes a live model (or one on the meta device) and the plan of a patch; out comes, for each kind
of methods whose code the plan uses, which properties hold: cached steps and chunks equal one pass,
padded rows equal rows alone, generate takes the likeliest tokens, cached keys follow a growing
text, caches of another rotation are refused, short texts keep their bits, undoing restores the
bits. `patch` asks for it on releases of transformers that were not tested, once for each model
class, kind and set of versions. `rope-patch env --check` asks for it at any time,
and `check_method` for one method, whose own rules `method_rules.py` checks before.

Read `first_use.py` first: when a proof is asked for, how one is made, and what follows.
`checks.py` has the properties, and `tiny_model.py` the model that they are checked on.
"""
