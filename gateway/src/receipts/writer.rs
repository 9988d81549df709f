//! Writer of a chain: one thread, one file at a time.
//!
//! A batch is appended as a whole or not at all: the partial lines of a failed write are truncated before the next
//! write, and the position of the chain is unchanged. Receipts that could not be written become a gap entry, which
//! precedes everything else in the next successful write.
//!
//! A batch that contains write-ahead entries is made durable before any of their requests is notified; requests that
//! arrive meanwhile wait for the next batch. So one fsync serves all requests that arrived during the previous one.
//!
//! The thread polls fifty times a second instead of being woken by each request: waking a thread costs more than
//! everything else a request does here. After a sleep the kernel would let it run to the end, a third of a millisecond
//! at 12,000 requests a second, while reactor threads wait for the core; so it yields after every few entries, as long
//! as that is cheap. Only a request that waits for its receipt wakes the thread.

mod entries;

use super::batch::{Batch, Pseudonyms, received};
use super::file::{ChainPosition, Name, list, lock, position};
use super::write_ahead::WriteAhead;
use super::{ReceiptsConfig, Shared, WriterMessage, now_ms};
use gateway_core::receipt::chain::ChainHash;
use gateway_core::receipt::entry::{Entry, GapReason, Role, VERSION};
use gateway_core::residency::Residency;
use rand::Rng;
use regions::id::RegionId;
use regions::set::RegionSet;
use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// Messages written at once: a few hundred KiB.
const BATCH_MAX: usize = 1024;
/// Entries between two yields: some ten microseconds of hashing.
const HANDFUL: usize = 8;
/// Time within a batch after which it stops yielding. On a core that is never idle each yield costs some milliseconds,
/// in which as many requests arrive as a batch holds; a writer that kept yielding would lose receipts.
const GIVES_WAY: Duration = Duration::from_millis(5);
/// Poll interval.
const PAUSE: Duration = Duration::from_millis(20);
/// Retry interval while writes fail.
const RETRY: Duration = Duration::from_millis(250);
/// Maximum time until a written receipt is synced to disk.
const SYNC_PERIOD: Duration = Duration::from_secs(1);

/// Writer of a chain.
pub(super) struct Writer {
    dir: PathBuf,
    role: Role,
    location: RegionId,
    /// Prefix of the keys of this process's attempts.
    process: u64,
    /// Region names by index.
    regions: Vec<RegionId>,
    shared: Arc<Shared>,
    file_bytes: u64,
    chain: String,
    /// Held while this process writes the chain.
    _lock: File,
    /// Current file; `None` before the first, and after a failed sync.
    file: Option<File>,
    number: u32,
    head: ChainHash,
    /// Valid bytes of the current file.
    len: u64,
    /// Whether the file may be longer than `len`.
    dirty: bool,
    /// Policies of the current file with their numbers.
    policies: HashMap<RegionSet, Vec<(Residency, u32)>>,
    pseudonyms: Pseudonyms,
    policies_known: usize,
    next_policy: u32,
    /// Missing receipts by reason, and since when.
    gaps: BTreeMap<GapReason, (u64, u64)>,
    /// Receipts that are written but not synced, and since when.
    unsynced: u64,
    unsynced_since: Option<Instant>,
    /// Numbers of durable write-ahead receipts whose outcome is not written yet.
    open: HashSet<u64>,
    /// Rejected requests that the chain already records.
    rejected_written: u64,
}

impl Writer {
    /// Continues the newest chain of the directory that no other process holds, or begins one.
    pub(super) fn open(
        config: &ReceiptsConfig,
        role: Role,
        location: &RegionId,
        regions: Vec<RegionId>,
        process: u64,
        shared: Arc<Shared>,
    ) -> io::Result<Writer> {
        let ReceiptsConfig { dir, key, required: _, queue: _, file_bytes } = config;
        fs::create_dir_all(dir)?;
        let existing = take_over(dir, role, location)?;
        let resumed = existing.is_some();
        let (chain, lock_file, position) = match existing {
            Some(existing) => existing,
            None => {
                // The name begins with the time, so the newest chain sorts last.
                let chain = format!("{:012x}{:08x}", now_ms(), rand::rng().random::<u32>());
                let lock_file = lock(dir, &chain)?.ok_or(io::ErrorKind::AlreadyExists)?;
                (chain, lock_file, ChainPosition::start())
            }
        };
        let ChainPosition { number, head, len, torn_bytes, clean, writer: _ } = position;
        if torn_bytes > 0 {
            let torn = Name { chain: chain.clone(), number }.in_dir(dir);
            OpenOptions::new().write(true).open(torn)?.set_len(len)?;
        }
        let mut writer = Writer {
            dir: dir.clone(),
            role,
            location: location.clone(),
            process,
            regions,
            shared,
            file_bytes: *file_bytes,
            chain,
            _lock: lock_file,
            file: None,
            // A file without valid bytes is created again.
            number: if len == 0 { number.saturating_sub(1) } else { number },
            head,
            len: 0,
            dirty: false,
            policies: HashMap::new(),
            pseudonyms: Pseudonyms::new(key.clone()),
            policies_known: 0,
            next_policy: 1,
            gaps: BTreeMap::new(),
            unsynced: 0,
            unsynced_since: None,
            open: HashSet::new(),
            rejected_written: 0,
        };
        writer.begin_file()?;
        if resumed {
            let mut batch = Batch::after(writer.head);
            batch.put(&Entry::Resumed { at_ms: now_ms(), clean, torn_bytes });
            writer.append(batch)?;
            // The process continues the receipts of the previous one. If that was killed, `clean` is false and an
            // incomplete line of `torn_bytes` bytes was removed.
            tracing::info!(chain = writer.chain, clean, torn_bytes, "receipt chain resumed");
        }
        writer.sync();
        Ok(writer)
    }

    pub(super) fn chain(&self) -> &str {
        &self.chain
    }

    /// Writes messages until `Close` or until all recorders are dropped.
    pub(super) fn run(mut self, mut queue: mpsc::Receiver<WriterMessage>) {
        let mut messages = Vec::with_capacity(BATCH_MAX);
        while self.next(&mut queue, &mut messages) {
            if messages.iter().any(|message| matches!(message, WriterMessage::Close)) {
                queue.close();
                break;
            }
            let full = messages.len() == BATCH_MAX;
            self.write(&mut messages);
            if self.unsynced_since.is_some_and(|since| since.elapsed() >= SYNC_PERIOD) {
                self.sync();
            }
            if self.shared.failing() {
                std::thread::park_timeout(RETRY);
            } else if !full {
                std::thread::park_timeout(PAUSE);
            }
        }
        // Messages submitted before the queue was closed.
        while let Ok(message) = queue.try_recv() {
            messages.push(message);
        }
        self.write(&mut messages);
        self.close();
    }

    /// Takes the queued messages, and blocks only if there is no other work; returns false once all recorders are
    /// dropped.
    fn next(&self, queue: &mut mpsc::Receiver<WriterMessage>, messages: &mut Vec<WriterMessage>) -> bool {
        if !self.has_unrecorded() && self.unsynced_since.is_none() && !self.shared.failing() {
            return queue.blocking_recv_many(messages, BATCH_MAX) > 0;
        }
        while messages.len() < BATCH_MAX {
            match queue.try_recv() {
                Ok(message) => messages.push(message),
                Err(mpsc::error::TryRecvError::Empty) => break,
                Err(mpsc::error::TryRecvError::Disconnected) => return !messages.is_empty(),
            }
        }
        true
    }

    /// Returns whether receipts are missing, or requests were rejected, that the chain does not record yet.
    fn has_unrecorded(&self) -> bool {
        !self.gaps.is_empty() || self.shared.counts.rejected.get() > self.rejected_written
    }

    /// Writes the gaps and then the messages. Requests that wait for a receipt are notified when all of it is durable.
    pub(super) fn write(&mut self, messages: &mut Vec<WriterMessage>) {
        let overflowed = self.shared.overflowed.swap(0, Ordering::Acquire);
        if overflowed > 0 {
            let since = self.shared.overflowed_since_ms.swap(0, Ordering::Relaxed);
            self.miss(GapReason::QueueFull, overflowed, since);
        }
        if messages.is_empty() && !self.has_unrecorded() {
            return;
        }
        let receipts = messages.iter().map(WriterMessage::receipts).sum();
        if !messages.is_empty() {
            // The queue is in order, so those that are left are as old as the last one that was taken, or younger.
            let may_leave_some = messages.len() == BATCH_MAX;
            let last_ms = messages.last().and_then(WriterMessage::ended_ms).filter(|_| may_leave_some);
            self.shared.pending.take(last_ms, now_ms());
        }
        let written = self.try_write(messages);
        let mut waiting = Vec::new();
        for message in messages.drain(..) {
            if let WriterMessage::WriteAhead(entry, reply) = message {
                waiting.push((entry.number(), reply));
            }
        }
        let was_failing = self.shared.failing();
        match written {
            Ok(()) => {
                self.shared.counts.written.add(receipts);
                self.unsynced += receipts;
                self.unsynced_since.get_or_insert_with(Instant::now);
                let durable = (waiting.is_empty() && !was_failing) || self.sync();
                if was_failing && durable {
                    self.shared.failing.store(false, Ordering::Relaxed);
                    // Writing receipts succeeds again. An entry in the chain has the number of missing ones.
                    tracing::info!(
                        chain = self.chain,
                        "receipts are written again; a gap records the missing ones"
                    );
                }
                for (number, reply) in waiting {
                    if durable {
                        self.open.insert(number);
                    }
                    // The request may have stopped waiting.
                    reply.send(durable).ok();
                }
            }
            Err(error) => {
                self.shared.failing.store(true, Ordering::Relaxed);
                for (_, reply) in waiting {
                    // The request may have stopped waiting.
                    reply.send(false).ok();
                }
                self.shared.counts.lost.of(GapReason::Disk).add(receipts);
                if self.unsynced_since.is_none() {
                    self.shared.pending.settle();
                }
                self.miss(GapReason::Disk, receipts, now_ms());
                // The policies may be in the part that is truncated.
                self.forget_policies();
                if !was_failing {
                    // Requests that require a receipt are rejected until writing succeeds. Check the disk.
                    tracing::error!(chain = self.chain, %error, "failed to write receipts; counting them as missing");
                }
            }
        }
    }

    fn miss(&mut self, reason: GapReason, receipts: u64, since_ms: u64) {
        if receipts == 0 {
            return;
        }
        let since_ms = if since_ms == 0 { now_ms() } else { since_ms };
        let (missing, since) = self.gaps.entry(reason).or_insert((0, since_ms));
        *missing += receipts;
        *since = (*since).min(since_ms);
    }

    fn try_write(&mut self, messages: &[WriterMessage]) -> io::Result<()> {
        if self.file.is_none() || self.len >= self.file_bytes {
            self.begin_file()?;
        }
        let at_ms = now_ms();
        let mut batch = Batch::after(self.head);
        for (reason, (missing, since_ms)) in self.gaps.iter().filter(|(_, (missing, _))| *missing > 0) {
            batch.put(&Entry::Gap { missing: *missing, reason: *reason, since_ms: *since_ms, at_ms });
        }
        let rejected = self.shared.counts.rejected.get();
        if rejected > self.rejected_written {
            let since_ms = match self.shared.rejected_since_ms.swap(0, Ordering::Relaxed) {
                0 => at_ms,
                since_ms => since_ms,
            };
            batch.put(&Entry::Rejected { requests: rejected - self.rejected_written, since_ms, at_ms });
        }
        let started = Instant::now();
        // Does not yield while a request waits for its receipt.
        let awaited = messages.iter().any(|message| matches!(message, WriterMessage::WriteAhead(..)));
        for chunk in messages.chunks(HANDFUL) {
            for message in chunk {
                match message {
                    WriterMessage::Finished(request) => self.put_finished(request, &mut batch),
                    WriterMessage::Received(request) => self.put_received(request, &mut batch),
                    WriterMessage::WriteAhead(entry, _) => match &**entry {
                        WriteAhead::Sending(sending) => self.put_sending(sending, &mut batch),
                        WriteAhead::Receiving(receiving) => {
                            batch.put(&received(&mut self.pseudonyms, receiving))
                        }
                    },
                    WriterMessage::Close => {}
                }
            }
            if !awaited && started.elapsed() < GIVES_WAY {
                std::thread::yield_now();
            }
        }
        self.append(batch)?;
        self.gaps.clear();
        self.rejected_written = rejected;
        Ok(())
    }

    /// Appends all entries of a batch, or none.
    fn append(&mut self, batch: Batch) -> io::Result<()> {
        let Batch { lines, head } = batch;
        let file = self.file.as_mut().expect("a file is created before entries are appended");
        if self.dirty {
            file.set_len(self.len)?;
        }
        self.dirty = true;
        if let Err(error) = file.write_all(&lines) {
            // Truncated at once where possible, so that no reader sees lines that will not stay.
            self.dirty = file.set_len(self.len).is_err();
            return Err(error);
        }
        self.dirty = false;
        (self.head, self.len) = (head, self.len + lines.len() as u64);
        self.shared.counts.bytes.add(lines.len() as u64);
        Ok(())
    }

    /// Creates the next file. The previous one is synced first.
    fn begin_file(&mut self) -> io::Result<()> {
        if self.file.is_some() {
            self.sync();
        }
        let number = self.number + 1;
        let path = Name { chain: self.chain.clone(), number }.in_dir(&self.dir);
        let mut file = OpenOptions::new().create(true).append(true).open(path)?;
        // The file exists already if writing its first line failed the last time.
        file.set_len(0)?;
        let mut batch = Batch::after(self.head);
        let begins = Entry::File {
            version: VERSION,
            chain: Cow::Borrowed(&self.chain),
            role: self.role,
            region: Cow::Borrowed(self.location.as_str()),
            number,
            before: self.head.to_string().into(),
            at_ms: now_ms(),
        };
        batch.put(&begins);
        let Batch { lines, head } = batch;
        file.write_all(&lines)?;
        File::open(&self.dir)?.sync_all()?;
        (self.file, self.number, self.head) = (Some(file), number, head);
        (self.len, self.dirty) = (lines.len() as u64, false);
        self.unsynced_since.get_or_insert_with(Instant::now);
        self.forget_policies();
        self.next_policy = 1;
        Ok(())
    }

    fn forget_policies(&mut self) {
        self.policies.clear();
        self.policies_known = 0;
    }

    /// Syncs the current file. After a failure it is unknown which lines are durable: the file is abandoned, and its
    /// unsynced receipts count as missing although they may exist. Returns whether everything is durable.
    fn sync(&mut self) -> bool {
        self.unsynced_since = None;
        let unsynced = std::mem::take(&mut self.unsynced);
        let Some(file) = &self.file else {
            self.shared.pending.settle();
            return unsynced == 0;
        };
        self.shared.counts.syncs.add(1);
        let synced = file.sync_data();
        // Not before: a disk that does not respond must be visible.
        self.shared.pending.settle();
        if let Err(error) = &synced {
            // Requests that require a receipt are rejected until writing succeeds. Check the disk.
            tracing::error!(chain = self.chain, %error, unsynced, "failed to sync receipts; counting them as missing");
            self.file = None;
            self.shared.counts.lost.of(GapReason::Unsynced).add(unsynced);
            self.shared.failing.store(true, Ordering::Relaxed);
            self.miss(GapReason::Unsynced, unsynced.max(1), now_ms());
        }
        synced.is_ok()
    }

    /// Closes the chain, if the disk accepts the entry.
    pub(super) fn close(mut self) {
        self.write(&mut Vec::new());
        let mut batch = Batch::after(self.head);
        batch.put(&Entry::Closed { at_ms: now_ms() });
        if self.file.is_some() && self.append(batch).is_ok() {
            self.sync();
        }
    }
}

/// Returns the newest chain of the directory that a process of this role and region wrote and no other process holds,
/// with its position.
fn take_over(
    dir: &std::path::Path,
    role: Role,
    location: &RegionId,
) -> io::Result<Option<(String, File, ChainPosition)>> {
    let names = list(dir)?;
    let mut chains: Vec<_> = names.iter().map(|name| &name.chain).collect();
    chains.dedup();
    for chain in chains.into_iter().rev() {
        let Some(lock_file) = lock(dir, chain)? else { continue };
        let files: Vec<_> = names.iter().filter(|name| name.chain == *chain).cloned().collect();
        let Some(position) = position(dir, &files)? else {
            // A file of receipts was damaged or changed. The files stay as they are: examine them with `meridian
            // verify-residency`.
            tracing::error!(chain, "receipt chain is corrupt; starting a new one");
            continue;
        };
        match &position.writer {
            Some((its_role, its_location)) if *its_role == role && its_location == location.as_str() => {
                return Ok(Some((chain.clone(), lock_file, position)));
            }
            Some(_) | None => {}
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests;
