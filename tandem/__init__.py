"""Tandem: a local LLM engine for AMD APUs, any Vulkan GPU and plain CPUs."""
