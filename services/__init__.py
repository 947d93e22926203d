"""The processes beside the gateway; each imports headrace and no other service."""
