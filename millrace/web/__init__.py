"""The pages of the server: playground, dashboard and API documentation.

`static/` holds HTML, CSS and ES modules as the browser loads them; there is no build step. `pages` serves them under a
strict content security policy. The pages use the public API only, with the key that the user entered.
"""
