"""A catalogue of mended defects, by the part of the package that had them."""

from regressions import encodings, lengths, methods, ops, patching, position_maps, serving

CATALOGUE = [
    *patching.DEFECTS,
    *position_maps.DEFECTS,
    *lengths.DEFECTS,
    *encodings.DEFECTS,
    *ops.DEFECTS,
    *methods.DEFECTS,
    *serving.DEFECTS,
]
