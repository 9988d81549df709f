//! Counter that takes a few nanoseconds to read. Its ticks have equal length, which depends on the processor.

/// Returns the ticks since an unspecified start.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(in super::super) fn ticks() -> u64 {
    // SAFETY: all x86-64 processors have the instruction, and it touches no memory.
    unsafe { std::arch::x86_64::_rdtsc() }
}

/// Returns the ticks since an unspecified start.
#[cfg(not(target_arch = "x86_64"))]
pub(in super::super) fn ticks() -> u64 {
    static BEGIN: std::sync::OnceLock<std::time::Instant> = std::sync::OnceLock::new();
    BEGIN.get_or_init(std::time::Instant::now).elapsed().as_nanos() as u64
}
