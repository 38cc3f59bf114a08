"""The page: its answers over HTTP, in a notebook and in a file.

| Module | Contents |
|---|---|
| `answers` | the table of routes, and the answer to a request along one of them |
| `routes` | the form of a path, and the scene, head and numbers that it names |
| `views` | the answer of each route |
| `registry` | scenes by id, and runs of typed texts |
| `results`, `store` | cached results about heads; a bounded cache, and long work in the background |
| `preparing` | answers that a thread prepares while the page is open |
| `codecs` | requests and answers as text and bytes |
| `server` | HTTP, on this machine alone |
| `notebook` | a widget of Jupyter |
| `contents`, `export`, `saving` | what a saved page holds; one HTML file; pictures and arrays |
| `kernels` | heads whose weights a page computes |
| `links` | addresses of views, from the command line's options |
| `built` | the built page that the package contains |
"""
