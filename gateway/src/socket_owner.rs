//! Finds the process that listens on a port, for the error message that the port is in use.
//!
//! Uses `/proc` (proc_pid_net(5)): the table of TCP sockets gives an inode, and the process that has this inode open is
//! searched among those this user may inspect. If it is not found, the message omits it.

use std::fs;
use std::net::SocketAddr;

/// State of a listening socket in `/proc/net/tcp`.
const LISTEN: &str = "0A";

/// Returns the identifier of the process that listens on the port of `address`, if it can be found.
pub(crate) fn listening_on(address: SocketAddr) -> Option<u32> {
    let tables = ["/proc/net/tcp", "/proc/net/tcp6"].map(|file| fs::read_to_string(file).unwrap_or_default());
    let inode = tables.iter().find_map(|table| inode_of(table, address.port()))?;
    let link = format!("socket:[{inode}]");
    let processes = fs::read_dir("/proc").ok()?.filter_map(Result::ok);
    let mut ids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    ids.find(|id| {
        let open = fs::read_dir(format!("/proc/{id}/fd")).into_iter().flatten().filter_map(Result::ok);
        open.filter_map(|file| fs::read_link(file.path()).ok()).any(|target| target.as_os_str() == &*link)
    })
}

/// Returns the inode of the socket that listens on `port`. In a row of the table the second column is the local
/// address, the fourth the state, the tenth the inode.
fn inode_of(table: &str, port: u16) -> Option<u64> {
    let port = format!(":{port:04X}");
    table.lines().find_map(|line| {
        let words: Vec<_> = line.split_whitespace().collect();
        let [_, local, _, state, ..] = words.as_slice() else { return None };
        let inode = words.get(9)?.parse().ok()?;
        (local.ends_with(&port) && *state == LISTEN).then_some(inode)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_row_of_a_listening_socket_is_found_by_its_port() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n   \
             0: 0100007F:1F90 0100007F:C350 01 00000000:00000000 00:00000000 00000000  1000        0 11 1 0 100 0\n   \
             1: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 22 1 0 100 0\n";
        assert_eq!(inode_of(table, 8080), Some(22));
        assert_eq!(inode_of(table, 8081), None);
        assert_eq!(inode_of("", 8080), None);
    }

    #[test]
    fn the_process_of_a_listening_socket_is_found() {
        let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        assert_eq!(listening_on(socket.local_addr().unwrap()), Some(std::process::id()));
    }
}
