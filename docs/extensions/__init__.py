"""Parts of the site that are our own."""
