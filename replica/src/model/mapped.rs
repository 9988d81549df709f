//! Memory-mapped files. The pages belong to the page cache, so processes that map the same model share them.

use std::fs::File;
use std::io;
use std::path::Path;

use memmap2::MmapOptions;

/// File that is mapped for reading.
#[derive(Debug)]
pub struct MappedFile(memmap2::Mmap);

impl MappedFile {
    /// Maps the file; pages are read on first access.
    pub fn open(path: &Path) -> io::Result<MappedFile> {
        MappedFile::map(&File::open(path)?, &MmapOptions::new())
    }

    /// Maps the file and reads all of it now.
    pub fn map_and_read(file: &File) -> io::Result<MappedFile> {
        MappedFile::map(file, MmapOptions::new().populate())
    }

    /// Allocates private memory of zeros, fills it with `fill` and makes it read-only.
    pub fn private(length: usize, fill: impl FnOnce(&mut [u8])) -> io::Result<MappedFile> {
        let mut memory = MmapOptions::new().len(length).map_anon()?;
        fill(&mut memory);
        memory.make_read_only().map(MappedFile)
    }

    fn map(file: &File, options: &MmapOptions) -> io::Result<MappedFile> {
        // SAFETY: the bytes behind a `&[u8]` must not change. Files in the model cache are renamed into place when they
        // are complete, are never written to again, and belong to this user or to root without write permission for
        // others (the cache and `packed_file` check both). An operator who configures a folder as a model must not
        // modify it while it is served, as with every server that maps weights.
        let map = unsafe { options.map(file)? };
        Ok(MappedFile(map))
    }

    /// Returns the whole file.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Returns the numbers from byte `start` to the end, in this machine's byte order; `None` if `start` is beyond the
    /// end or not aligned.
    pub fn floats(&self, start: usize) -> Option<&[f32]> {
        // SAFETY: every bit pattern is a valid `f32`, and `align_to` ensures the alignment.
        let (before, floats, _) = unsafe { self.0.get(start..)?.align_to::<f32>() };
        before.is_empty().then_some(floats)
    }
}
