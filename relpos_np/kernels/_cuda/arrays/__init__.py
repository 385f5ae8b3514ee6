"""Arrays on the device, which calls take and return."""
