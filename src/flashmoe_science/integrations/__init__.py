"""Our functions in the registries of other projects. A module a project; the project is imported when its module is used."""
