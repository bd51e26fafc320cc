"""The broker: one process per user in the host's namespaces. It holds the registry, opens what sandboxes
show, and starts everything else. May import ral_protocol, trio and msgspec; never the client, never a
helper."""
