"""What the threads of a warp and of a block do together: loads, tiles, products, passes over elements."""
