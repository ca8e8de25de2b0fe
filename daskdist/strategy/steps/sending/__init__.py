"""The sending of calls: their arguments, and the objects that workers keep."""
