"""Commands about models on this machine and the servers that run them: pull, ls, show, rm, alias, models, ps, stop."""
