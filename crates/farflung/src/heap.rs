//! Memory that the allocator keeps after it was freed.

/// Gives memory that was freed back to the system, where the allocator keeps it. After members have changed,
/// that is the log of steps for a newcomer: up to twice the state, in pieces that the allocator would keep.
pub(crate) fn give_back() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        #[expect(unsafe_code, reason = "there is no safe way to ask the allocator for this")]
        // SAFETY: the function may be called at any time and from any thread. It changes no memory in use.
        unsafe {
            libc::malloc_trim(0);
        }
    }
}
