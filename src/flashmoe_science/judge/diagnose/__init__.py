"""Why a kernel is not faster: the facts on record, the causes that they support, the changes that those call for."""
