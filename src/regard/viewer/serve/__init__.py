"""The page: its answers over HTTP, in a notebook and in a file.

| Module | Contents |
|---|---|
| `answers` | the page's requests, and their answers |
| `store` | cached results, and long work in the background |
| `server` | HTTP, on this machine alone |
| `notebook` | a widget of Jupyter |
| `export`, `saving` | one HTML file; pictures and arrays |
| `links` | addresses of views, from the command line's options |
| `built` | the built page that the package contains |
"""
