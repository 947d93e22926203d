"""The wire: generated stubs, server and client set-up, conversions."""
