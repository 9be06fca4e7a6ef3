"""Salt of the prefix cache, by profile: keys of one text under two rotations differ."""

from __future__ import annotations


def profile_salt(profile: int, user_salt: str | None) -> str:
    """Return the salt of a request's first block, from its profile and the user's own salt.

    Different pairs have different salts: the text up to the first colon is the profile, so no
    user's salt can name another profile's blocks.

    Args:
        profile: Index of the request's profile.
        user_salt: `cache_salt` of the request; vLLM takes None and "" alike.
    """
    return f"{profile}:{user_salt or ''}"
