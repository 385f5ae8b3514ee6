"""The kernel that makes gradients."""
