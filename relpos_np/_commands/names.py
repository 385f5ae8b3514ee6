"""What people call a scheme: its name, its class, a word of the field, or a variant that it alone has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from relpos_np._commands.common import UnusableError
from relpos_np.schemes.registry import SCHEMES

# What the field says, where that is neither a name nor a variant.
_SAID = {"rope": "rotary", "nope": "plain"}


def _plain(text: str) -> str:
    """Without what people write differently: capital letters, and what joins words."""
    return "".join(letter for letter in text.lower() if letter.isalnum())


def attention_schemes() -> list[str]:
    """Names of the schemes that attention takes."""
    return [name for name, info in SCHEMES.items() if info.kind == "attention"]


def _variants() -> dict[str, tuple[str, str]]:
    """Scheme and variant by variants that one scheme alone has."""
    shared = Counter(variant for info in SCHEMES.values() for variant in info.variants)
    return {
        _plain(variant): (name, variant)
        for name, info in SCHEMES.items()
        for variant in info.variants
        if shared[variant] == 1
    }


def scheme_named(text: object, variant: str | None = None, *, expected: Collection[str]) -> tuple[str, str | None]:
    """The name that is meant, one of those expected or of any scheme, and the variant: that given, or that named."""
    word = _plain(str(text))
    names = {_plain(info.cls.__name__): name for name, info in SCHEMES.items()}
    names |= _SAID | {_plain(name): name for name in (*SCHEMES, *expected)}
    owned = {variant: found for variant, found in _variants().items() if variant not in names}
    if word in names:
        return names[word], variant
    if word in owned:
        name, own = owned[word]
        if variant not in (None, own):
            raise UnusableError(f"--variant: {own} is a variant of {name} itself; found {variant!r}")
        return name, own
    from difflib import get_close_matches

    meant = names | {variant: name for variant, (name, _) in owned.items()}
    near = dict.fromkeys(meant[one] for one in get_close_matches(word, meant, 3) if meant[one] in expected)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    raise UnusableError(f"scheme: expected one of {', '.join(expected)}; found {str(text)!r}{hint}")
