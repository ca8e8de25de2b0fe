"""Elements that cannot be read or computed: their origins, their errors, and leaving them out."""
