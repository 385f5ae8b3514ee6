"""Given positions, as loops: what the other scheme adds for a distance, at the distance of the positions."""

from functools import cache

from tests.naive.by_name import Loops, flat, of, witness


@witness("at_positions")
def at_positions(q, k, scheme, positions, key_positions, heads, l_q, l_k, offset, scale, batch):
    """The scheme's term where j - (i + M) is t_j - s_i (depths in a tree of tokens: Miao 2024, section 4)."""
    known = {"alibi": "ALiBi", "kerple": "KERPLE", "shaw": "Shaw", "t5": "T5"}
    (name,) = [name for name, kind in known.items() if type(scheme).__name__ == kind]
    given = {key: x for key, x in vars(scheme).items() if key[0] != "_"}
    call = {"q": q, "k": k, "l_q": l_q, "l_k": l_k, "heads": heads, "scale": scale, "batch": batch}
    keys = flat(positions if key_positions is None else key_positions, batch, 1)
    queries = keys[:, offset : offset + l_q] if key_positions is None else flat(positions, batch, 1)

    @cache
    def loops(shift):
        return of(name, given, **call, offset=shift)

    def at(kind):
        def term(b, h, i, j):
            return getattr(loops(j - i - int(keys[b][j] - queries[b][i])), kind)(b, h, i, j)

        return term

    return Loops(*(at(kind) if getattr(loops(0), kind) else None for kind in ("logit", "value")))
