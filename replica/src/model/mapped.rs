//! A file as memory. The pages are those of the page cache: all processes that map one model hold it once.

use std::fs::File;
use std::io;
use std::path::Path;

use memmap2::MmapOptions;

/// A whole file, mapped for reading.
#[derive(Debug)]
pub struct MappedFile(memmap2::Mmap);

impl MappedFile {
    /// Maps the file; a page is read when it is first touched.
    pub fn open(path: &Path) -> io::Result<MappedFile> {
        MappedFile::map(&File::open(path)?, &MmapOptions::new())
    }

    /// Maps the file and has all of it read now.
    pub fn map_and_read(file: &File) -> io::Result<MappedFile> {
        MappedFile::map(file, MmapOptions::new().populate())
    }

    /// Memory of this process alone, all zeros before `fill` writes to it.
    pub fn private(length: usize, fill: impl FnOnce(&mut [u8])) -> io::Result<MappedFile> {
        let mut memory = MmapOptions::new().len(length).map_anon()?;
        fill(&mut memory);
        memory.make_read_only().map(MappedFile)
    }

    fn map(file: &File, options: &MmapOptions) -> io::Result<MappedFile> {
        // SAFETY: the bytes behind a `&[u8]` must not change. Files in the model cache are renamed into place whole, are
        // never written to again, and belong to this user or to root with no right to write for others (the cache and
        // `packed_file` check both). A folder that an operator names as a model is the operator's to leave alone while it
        // is served, as it is with every server that maps weights.
        let map = unsafe { options.map(file)? };
        Ok(MappedFile(map))
    }

    /// All of it.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// From byte `start` to the end, as numbers in this machine's byte order; `None` if `start` is beyond the end or
    /// not where a number can begin.
    pub fn floats(&self, start: usize) -> Option<&[f32]> {
        // SAFETY: every pattern of bits is an `f32`, and `align_to` sees to the alignment.
        let (before, floats, _) = unsafe { self.0.get(start..)?.align_to::<f32>() };
        before.is_empty().then_some(floats)
    }
}
