"""From one stack file to running applications: the file, its rules, the engines' plans."""
