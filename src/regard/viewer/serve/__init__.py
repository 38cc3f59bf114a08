"""The page: its answers over HTTP, in a notebook and in a file.

| Module | Contents |
|---|---|
| `answers` | what the page may ask, and the answers |
| `store` | cached results, and long work in the background |
| `server` | HTTP, on this machine alone |
| `notebook` | a widget of Jupyter |
| `export`, `saving` | one HTML file; pictures and arrays |
| `links` | addresses of views, from the command line's options |
| `built` | the page as it was built with the package |
"""
