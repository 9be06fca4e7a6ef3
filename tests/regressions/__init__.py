"""A catalogue of mended defects, by the part of the package that had them."""

from regressions import patching

CATALOGUE = [*patching.DEFECTS]
