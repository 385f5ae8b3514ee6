"""Beyond examples: bugs that show only at sizes past those of the examples."""

from tests.mutation.anchors import Bug

# fmt: off
BEYOND: list[Bug] = [
]
# fmt: on
