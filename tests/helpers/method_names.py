"""Names of methods by what they change."""

from rope_patch.methods import registered_methods


def position_maps():
    """Return the methods that map positions in attention."""
    return [name for name, each in registered_methods().items() if hasattr(each, "map_regions")]


def frequency_methods():
    """Return the methods that change frequencies."""
    return [name for name in registered_methods() if name not in position_maps()]
