//! What an attempt can come to, and the two questions that it raises.
//!
//! *May this be tried again?* depends on how far the attempt got: before the first byte of an answer, a second attempt
//! cannot give the client two answers, and everything that the edge forwards today computes and changes nothing.
//! *Is my picture of the region wrong?* is another question with its own answer: a stale pooled connection says nothing
//! about a region, a refused one does.

/// How an attempt ended without an answer that the client could have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// A pooled connection turned out to be closed: the region let go of it while it was idle, and has not seen the
    /// request.
    StaleConnection,
    /// The region could not be reached, or broke off before the first byte of an answer.
    Unreachable,
    /// Who answered at the region's address proved to be somebody else; not a byte of the request was sent.
    WrongPeer,
    /// The region answered that it cannot, and that another could.
    Elsewhere,
    /// Nothing came within the time in which this region answers such requests, and somebody else could take over.
    Late,
    /// Nothing came, and meanwhile the region was found to be lost.
    Lost,
    /// Nothing came before the deadline of the request.
    DeadlinePassed,
}

impl Failure {
    /// Whether it speaks against the region.
    pub fn blames_region(self) -> bool {
        match self {
            Failure::Unreachable | Failure::WrongPeer => true,
            // The watch has already counted a loss and a miss; a deadline may be the client's impatience; an answer
            // proves life.
            Failure::StaleConnection
            | Failure::Elsewhere
            | Failure::Late
            | Failure::Lost
            | Failure::DeadlinePassed => false,
        }
    }
}
