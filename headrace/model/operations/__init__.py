"""The operations of a decoder that use large weights, each able to borrow them while it runs."""
