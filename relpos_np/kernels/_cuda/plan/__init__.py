"""From a call to arrays on the device and the launches that use them."""
