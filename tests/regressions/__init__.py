"""A catalogue of mended defects, by the part of the package that had them."""

from regressions import encodings, lengths, ops, patching, position_maps

CATALOGUE = [
    *patching.DEFECTS,
    *position_maps.DEFECTS,
    *lengths.DEFECTS,
    *encodings.DEFECTS,
    *ops.DEFECTS,
]
