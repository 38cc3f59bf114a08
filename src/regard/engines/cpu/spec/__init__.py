"""What each kernel and its caller agree on: fields, items, scratch memory, and what is compiled anew."""
