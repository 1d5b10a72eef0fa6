%tile_0_1 = aie.tile(0, 1)
%A_0_0_1 = aie.buffer(%tile_0_1) {sym_name = "A_0_0_1", address = 0 : i32} : memref<32xi32>
%A_1_0_1 = aie.buffer(%tile_0_1) {sym_name = "A_1_0_1", address = 128 : i32} : memref<32xi32>
%B_0_0_1 = aie.buffer(%tile_0_1) {sym_name = "B_0_0_1", address = 256 : i32} : memref<64xi32>
%B_1_0_1 = aie.buffer(%tile_0_1) {sym_name = "B_1_0_1", address = 512 : i32} : memref<64xi32>
%C0_0_0_1 = aie.buffer(%tile_0_1) {sym_name = "C0_0_0_1", address = 768 : i32} : memref<32xi32>
%C0_1_0_1 = aie.buffer(%tile_0_1) {sym_name = "C0_1_0_1", address = 896 : i32} : memref<32xi32>
%C1_0_0_1 = aie.buffer(%tile_0_1) {sym_name = "C1_0_0_1", address = 1024 : i32} : memref<32xi32>
%C1_1_0_1 = aie.buffer(%tile_0_1) {sym_name = "C1_1_0_1", address = 1152 : i32} : memref<32xi32>
%C2_0_0_1 = aie.buffer(%tile_0_1) {sym_name = "C2_0_0_1", address = 1280 : i32} : memref<32xi32>
%C2_1_0_1 = aie.buffer(%tile_0_1) {sym_name = "C2_1_0_1", address = 1408 : i32} : memref<32xi32>
%C3_0_0_1 = aie.buffer(%tile_0_1) {sym_name = "C3_0_0_1", address = 1536 : i32} : memref<32xi32>
%C3_1_0_1 = aie.buffer(%tile_0_1) {sym_name = "C3_1_0_1", address = 1664 : i32} : memref<32xi32>
%lock_0_1_0 = aie.lock(%tile_0_1, 0) {init = 2 : i32}
%lock_0_1_1 = aie.lock(%tile_0_1, 1) {init = 0 : i32}
%lock_0_1_2 = aie.lock(%tile_0_1, 2) {init = 2 : i32}
%lock_0_1_3 = aie.lock(%tile_0_1, 3) {init = 0 : i32}
%lock_0_1_4 = aie.lock(%tile_0_1, 4) {init = 2 : i32}
%lock_0_1_5 = aie.lock(%tile_0_1, 5) {init = 0 : i32}
%lock_0_1_6 = aie.lock(%tile_0_1, 6) {init = 2 : i32}
%lock_0_1_7 = aie.lock(%tile_0_1, 7) {init = 0 : i32}
%lock_0_1_8 = aie.lock(%tile_0_1, 8) {init = 2 : i32}
%lock_0_1_9 = aie.lock(%tile_0_1, 9) {init = 0 : i32}
%lock_0_1_10 = aie.lock(%tile_0_1, 10) {init = 2 : i32}
%lock_0_1_11 = aie.lock(%tile_0_1, 11) {init = 0 : i32}
%dma_0_1 = aie.memtile_dma(%tile_0_1) {
  %0 = aie.dma_start(S2MM, 0, ^bd0, ^channel1)
^bd0:
  aie.use_lock(%lock_0_1_0, AcquireGreaterEqual, 1)
  aie.dma_bd(%A_0_0_1 : memref<32xi32>, 0, 32) {bd_id = 0 : i32, next_bd_id = 1 : i32}
  aie.use_lock(%lock_0_1_1, Release, 1)
  aie.next_bd ^bd1
^bd1:
  aie.use_lock(%lock_0_1_0, AcquireGreaterEqual, 1)
  aie.dma_bd(%A_1_0_1 : memref<32xi32>, 0, 32) {bd_id = 1 : i32, next_bd_id = 0 : i32}
  aie.use_lock(%lock_0_1_1, Release, 1)
  aie.next_bd ^bd0
^channel1:
  %1 = aie.dma_start(MM2S, 0, ^bd2, ^channel2)
^bd2:
  aie.use_lock(%lock_0_1_1, AcquireGreaterEqual, 1)
  aie.dma_bd(%A_0_0_1 : memref<32xi32>, 0, 32, [<size = 2, stride = 16>, <size = 2, stride = 2>, <size = 4, stride = 4>, <size = 2, stride = 1>]) {bd_id = 2 : i32, next_bd_id = 3 : i32}
  aie.use_lock(%lock_0_1_0, Release, 1)
  aie.next_bd ^bd3
^bd3:
  aie.use_lock(%lock_0_1_1, AcquireGreaterEqual, 1)
  aie.dma_bd(%A_1_0_1 : memref<32xi32>, 0, 32, [<size = 2, stride = 16>, <size = 2, stride = 2>, <size = 4, stride = 4>, <size = 2, stride = 1>]) {bd_id = 3 : i32, next_bd_id = 2 : i32}
  aie.use_lock(%lock_0_1_0, Release, 1)
  aie.next_bd ^bd2
^channel2:
  %2 = aie.dma_start(S2MM, 1, ^bd24, ^channel3)
^bd24:
  aie.use_lock(%lock_0_1_2, AcquireGreaterEqual, 1)
  aie.dma_bd(%B_0_0_1 : memref<64xi32>, 0, 64) {bd_id = 24 : i32, next_bd_id = 25 : i32}
  aie.use_lock(%lock_0_1_3, Release, 1)
  aie.next_bd ^bd25
^bd25:
  aie.use_lock(%lock_0_1_2, AcquireGreaterEqual, 1)
  aie.dma_bd(%B_1_0_1 : memref<64xi32>, 0, 64) {bd_id = 25 : i32, next_bd_id = 24 : i32}
  aie.use_lock(%lock_0_1_3, Release, 1)
  aie.next_bd ^bd24
^channel3:
  %3 = aie.dma_start(MM2S, 1, ^bd26, ^channel4)
^bd26:
  aie.use_lock(%lock_0_1_3, AcquireGreaterEqual, 1)
  aie.dma_bd(%B_0_0_1 : memref<64xi32>, 0, 64, [<size = 2, stride = 32>, <size = 2, stride = 2>, <size = 8, stride = 4>, <size = 2, stride = 1>]) {bd_id = 26 : i32, next_bd_id = 27 : i32}
  aie.use_lock(%lock_0_1_2, Release, 1)
  aie.next_bd ^bd27
^bd27:
  aie.use_lock(%lock_0_1_3, AcquireGreaterEqual, 1)
  aie.dma_bd(%B_1_0_1 : memref<64xi32>, 0, 64, [<size = 2, stride = 32>, <size = 2, stride = 2>, <size = 8, stride = 4>, <size = 2, stride = 1>]) {bd_id = 27 : i32, next_bd_id = 26 : i32}
  aie.use_lock(%lock_0_1_2, Release, 1)
  aie.next_bd ^bd26
^channel4:
  %4 = aie.dma_start(S2MM, 2, ^bd4, ^channel5)
^bd4:
  aie.use_lock(%lock_0_1_4, AcquireGreaterEqual, 1)
  aie.dma_bd(%C0_0_0_1 : memref<32xi32>, 0, 32) {bd_id = 4 : i32, next_bd_id = 5 : i32}
  aie.use_lock(%lock_0_1_5, Release, 1)
  aie.next_bd ^bd5
^bd5:
  aie.use_lock(%lock_0_1_4, AcquireGreaterEqual, 1)
  aie.dma_bd(%C0_1_0_1 : memref<32xi32>, 0, 32) {bd_id = 5 : i32, next_bd_id = 4 : i32}
  aie.use_lock(%lock_0_1_5, Release, 1)
  aie.next_bd ^bd4
^channel5:
  %5 = aie.dma_start(S2MM, 3, ^bd28, ^channel6)
^bd28:
  aie.use_lock(%lock_0_1_6, AcquireGreaterEqual, 1)
  aie.dma_bd(%C1_0_0_1 : memref<32xi32>, 0, 32) {bd_id = 28 : i32, next_bd_id = 29 : i32}
  aie.use_lock(%lock_0_1_7, Release, 1)
  aie.next_bd ^bd29
^bd29:
  aie.use_lock(%lock_0_1_6, AcquireGreaterEqual, 1)
  aie.dma_bd(%C1_1_0_1 : memref<32xi32>, 0, 32) {bd_id = 29 : i32, next_bd_id = 28 : i32}
  aie.use_lock(%lock_0_1_7, Release, 1)
  aie.next_bd ^bd28
^channel6:
  %6 = aie.dma_start(S2MM, 4, ^bd6, ^channel7)
^bd6:
  aie.use_lock(%lock_0_1_8, AcquireGreaterEqual, 1)
  aie.dma_bd(%C2_0_0_1 : memref<32xi32>, 0, 32) {bd_id = 6 : i32, next_bd_id = 7 : i32}
  aie.use_lock(%lock_0_1_9, Release, 1)
  aie.next_bd ^bd7
^bd7:
  aie.use_lock(%lock_0_1_8, AcquireGreaterEqual, 1)
  aie.dma_bd(%C2_1_0_1 : memref<32xi32>, 0, 32) {bd_id = 7 : i32, next_bd_id = 6 : i32}
  aie.use_lock(%lock_0_1_9, Release, 1)
  aie.next_bd ^bd6
^channel7:
  %7 = aie.dma_start(S2MM, 5, ^bd30, ^channel8)
^bd30:
  aie.use_lock(%lock_0_1_10, AcquireGreaterEqual, 1)
  aie.dma_bd(%C3_0_0_1 : memref<32xi32>, 0, 32) {bd_id = 30 : i32, next_bd_id = 31 : i32}
  aie.use_lock(%lock_0_1_11, Release, 1)
  aie.next_bd ^bd31
^bd31:
  aie.use_lock(%lock_0_1_10, AcquireGreaterEqual, 1)
  aie.dma_bd(%C3_1_0_1 : memref<32xi32>, 0, 32) {bd_id = 31 : i32, next_bd_id = 30 : i32}
  aie.use_lock(%lock_0_1_11, Release, 1)
  aie.next_bd ^bd30
^channel8:
  %8 = aie.dma_start(MM2S, 2, ^bd8, ^end)
^bd8:
  aie.use_lock(%lock_0_1_5, AcquireGreaterEqual, 1)
  aie.dma_bd(%C0_0_0_1 : memref<32xi32>, 0, 32, [<size = 2, stride = 16>, <size = 4, stride = 2>, <size = 2, stride = 8>, <size = 2, stride = 1>]) {bd_id = 8 : i32, next_bd_id = 9 : i32}
  aie.use_lock(%lock_0_1_4, Release, 1)
  aie.next_bd ^bd9
^bd9:
  aie.use_lock(%lock_0_1_7, AcquireGreaterEqual, 1)
  aie.dma_bd(%C1_0_0_1 : memref<32xi32>, 0, 32, [<size = 2, stride = 16>, <size = 4, stride = 2>, <size = 2, stride = 8>, <size = 2, stride = 1>]) {bd_id = 9 : i32, next_bd_id = 10 : i32}
  aie.use_lock(%lock_0_1_6, Release, 1)
  aie.next_bd ^bd10
^bd10:
  aie.use_lock(%lock_0_1_9, AcquireGreaterEqual, 1)
  aie.dma_bd(%C2_0_0_1 : memref<32xi32>, 0, 32, [<size = 2, stride = 16>, <size = 4, stride = 2>, <size = 2, stride = 8>, <size = 2, stride = 1>]) {bd_id = 10 : i32, next_bd_id = 11 : i32}
  aie.use_lock(%lock_0_1_8, Release, 1)
  aie.next_bd ^bd11
^bd11:
  aie.use_lock(%lock_0_1_11, AcquireGreaterEqual, 1)
  aie.dma_bd(%C3_0_0_1 : memref<32xi32>, 0, 32, [<size = 2, stride = 16>, <size = 4, stride = 2>, <size = 2, stride = 8>, <size = 2, stride = 1>]) {bd_id = 11 : i32, next_bd_id = 12 : i32}
  aie.use_lock(%lock_0_1_10, Release, 1)
  aie.next_bd ^bd12
^bd12:
  aie.use_lock(%lock_0_1_5, AcquireGreaterEqual, 1)
  aie.dma_bd(%C0_1_0_1 : memref<32xi32>, 0, 32, [<size = 2, stride = 16>, <size = 4, stride = 2>, <size = 2, stride = 8>, <size = 2, stride = 1>]) {bd_id = 12 : i32, next_bd_id = 13 : i32}
  aie.use_lock(%lock_0_1_4, Release, 1)
  aie.next_bd ^bd13
^bd13:
  aie.use_lock(%lock_0_1_7, AcquireGreaterEqual, 1)
  aie.dma_bd(%C1_1_0_1 : memref<32xi32>, 0, 32, [<size = 2, stride = 16>, <size = 4, stride = 2>, <size = 2, stride = 8>, <size = 2, stride = 1>]) {bd_id = 13 : i32, next_bd_id = 14 : i32}
  aie.use_lock(%lock_0_1_6, Release, 1)
  aie.next_bd ^bd14
^bd14:
  aie.use_lock(%lock_0_1_9, AcquireGreaterEqual, 1)
  aie.dma_bd(%C2_1_0_1 : memref<32xi32>, 0, 32, [<size = 2, stride = 16>, <size = 4, stride = 2>, <size = 2, stride = 8>, <size = 2, stride = 1>]) {bd_id = 14 : i32, next_bd_id = 15 : i32}
  aie.use_lock(%lock_0_1_8, Release, 1)
  aie.next_bd ^bd15
^bd15:
  aie.use_lock(%lock_0_1_11, AcquireGreaterEqual, 1)
  aie.dma_bd(%C3_1_0_1 : memref<32xi32>, 0, 32, [<size = 2, stride = 16>, <size = 4, stride = 2>, <size = 2, stride = 8>, <size = 2, stride = 1>]) {bd_id = 15 : i32, next_bd_id = 8 : i32}
  aie.use_lock(%lock_0_1_10, Release, 1)
  aie.next_bd ^bd8
^end:
  aie.end
}
%tile_3_5 = aie.tile(3, 5)
%A_0_3_5 = aie.buffer(%tile_3_5) {sym_name = "A_0_3_5", address = 1024 : i32} : memref<32xi32>
%A_1_3_5 = aie.buffer(%tile_3_5) {sym_name = "A_1_3_5", address = 1152 : i32} : memref<32xi32>
%B_0_3_5 = aie.buffer(%tile_3_5) {sym_name = "B_0_3_5", address = 1280 : i32} : memref<64xi32>
%B_1_3_5 = aie.buffer(%tile_3_5) {sym_name = "B_1_3_5", address = 1536 : i32} : memref<64xi32>
%C_0_3_5 = aie.buffer(%tile_3_5) {sym_name = "C_0_3_5", address = 1792 : i32} : memref<32xi32>
%C_1_3_5 = aie.buffer(%tile_3_5) {sym_name = "C_1_3_5", address = 1920 : i32} : memref<32xi32>
%accumulator_3_5 = aie.buffer(%tile_3_5) {sym_name = "accumulator_3_5", address = 2048 : i32} : memref<128xi32>
%lock_3_5_0 = aie.lock(%tile_3_5, 0) {init = 2 : i32}
%lock_3_5_1 = aie.lock(%tile_3_5, 1) {init = 0 : i32}
%lock_3_5_2 = aie.lock(%tile_3_5, 2) {init = 2 : i32}
%lock_3_5_3 = aie.lock(%tile_3_5, 3) {init = 0 : i32}
%lock_3_5_4 = aie.lock(%tile_3_5, 4) {init = 2 : i32}
%lock_3_5_5 = aie.lock(%tile_3_5, 5) {init = 0 : i32}
%dma_3_5 = aie.mem(%tile_3_5) {
  %0 = aie.dma_start(S2MM, 0, ^bd0, ^channel1)
^bd0:
  aie.use_lock(%lock_3_5_0, AcquireGreaterEqual, 1)
  aie.dma_bd(%A_0_3_5 : memref<32xi32>, 0, 32) {bd_id = 0 : i32, next_bd_id = 1 : i32}
  aie.use_lock(%lock_3_5_1, Release, 1)
  aie.next_bd ^bd1
^bd1:
  aie.use_lock(%lock_3_5_0, AcquireGreaterEqual, 1)
  aie.dma_bd(%A_1_3_5 : memref<32xi32>, 0, 32) {bd_id = 1 : i32, next_bd_id = 0 : i32}
  aie.use_lock(%lock_3_5_1, Release, 1)
  aie.next_bd ^bd0
^channel1:
  %1 = aie.dma_start(S2MM, 1, ^bd2, ^channel2)
^bd2:
  aie.use_lock(%lock_3_5_2, AcquireGreaterEqual, 1)
  aie.dma_bd(%B_0_3_5 : memref<64xi32>, 0, 64) {bd_id = 2 : i32, next_bd_id = 3 : i32}
  aie.use_lock(%lock_3_5_3, Release, 1)
  aie.next_bd ^bd3
^bd3:
  aie.use_lock(%lock_3_5_2, AcquireGreaterEqual, 1)
  aie.dma_bd(%B_1_3_5 : memref<64xi32>, 0, 64) {bd_id = 3 : i32, next_bd_id = 2 : i32}
  aie.use_lock(%lock_3_5_3, Release, 1)
  aie.next_bd ^bd2
^channel2:
  %2 = aie.dma_start(MM2S, 0, ^bd4, ^end)
^bd4:
  aie.use_lock(%lock_3_5_5, AcquireGreaterEqual, 1)
  aie.dma_bd(%C_0_3_5 : memref<32xi32>, 0, 32) {bd_id = 4 : i32, next_bd_id = 5 : i32}
  aie.use_lock(%lock_3_5_4, Release, 1)
  aie.next_bd ^bd5
^bd5:
  aie.use_lock(%lock_3_5_5, AcquireGreaterEqual, 1)
  aie.dma_bd(%C_1_3_5 : memref<32xi32>, 0, 32) {bd_id = 5 : i32, next_bd_id = 4 : i32}
  aie.use_lock(%lock_3_5_4, Release, 1)
  aie.next_bd ^bd4
^end:
  aie.end
}
%core_3_5 = aie.core(%tile_3_5) {
  %zero = arith.constant 0 : index
  %one = arith.constant 1 : index
  %ever = arith.constant 4294967295 : index
  %pairs = arith.constant 1 : index
  %shift = arith.constant 6 : i32
  scf.for %turn = %zero to %ever step %one {
    aie.use_lock(%lock_3_5_1, AcquireGreaterEqual, 1)
    aie.use_lock(%lock_3_5_3, AcquireGreaterEqual, 1)
    aie.use_lock(%lock_3_5_4, AcquireGreaterEqual, 1)
    func.call @zero(%accumulator_3_5) : (memref<128xi32>) -> ()
    func.call @multiply(%A_0_3_5, %B_0_3_5, %accumulator_3_5) : (memref<32xi32>, memref<64xi32>, memref<128xi32>) -> ()
    aie.use_lock(%lock_3_5_0, Release, 1)
    aie.use_lock(%lock_3_5_2, Release, 1)
    scf.for %pair = %zero to %pairs step %one {
      aie.use_lock(%lock_3_5_1, AcquireGreaterEqual, 1)
      aie.use_lock(%lock_3_5_3, AcquireGreaterEqual, 1)
      func.call @multiply(%A_1_3_5, %B_1_3_5, %accumulator_3_5) : (memref<32xi32>, memref<64xi32>, memref<128xi32>) -> ()
      aie.use_lock(%lock_3_5_0, Release, 1)
      aie.use_lock(%lock_3_5_2, Release, 1)
      aie.use_lock(%lock_3_5_1, AcquireGreaterEqual, 1)
      aie.use_lock(%lock_3_5_3, AcquireGreaterEqual, 1)
      func.call @multiply(%A_0_3_5, %B_0_3_5, %accumulator_3_5) : (memref<32xi32>, memref<64xi32>, memref<128xi32>) -> ()
      aie.use_lock(%lock_3_5_0, Release, 1)
      aie.use_lock(%lock_3_5_2, Release, 1)
    }
    func.call @store_half_even(%accumulator_3_5, %C_0_3_5, %shift) : (memref<128xi32>, memref<32xi32>, i32) -> ()
    aie.use_lock(%lock_3_5_5, Release, 1)
    aie.use_lock(%lock_3_5_1, AcquireGreaterEqual, 1)
    aie.use_lock(%lock_3_5_3, AcquireGreaterEqual, 1)
    aie.use_lock(%lock_3_5_4, AcquireGreaterEqual, 1)
    func.call @zero(%accumulator_3_5) : (memref<128xi32>) -> ()
    func.call @multiply(%A_1_3_5, %B_1_3_5, %accumulator_3_5) : (memref<32xi32>, memref<64xi32>, memref<128xi32>) -> ()
    aie.use_lock(%lock_3_5_0, Release, 1)
    aie.use_lock(%lock_3_5_2, Release, 1)
    scf.for %pair = %zero to %pairs step %one {
      aie.use_lock(%lock_3_5_1, AcquireGreaterEqual, 1)
      aie.use_lock(%lock_3_5_3, AcquireGreaterEqual, 1)
      func.call @multiply(%A_0_3_5, %B_0_3_5, %accumulator_3_5) : (memref<32xi32>, memref<64xi32>, memref<128xi32>) -> ()
      aie.use_lock(%lock_3_5_0, Release, 1)
      aie.use_lock(%lock_3_5_2, Release, 1)
      aie.use_lock(%lock_3_5_1, AcquireGreaterEqual, 1)
      aie.use_lock(%lock_3_5_3, AcquireGreaterEqual, 1)
      func.call @multiply(%A_1_3_5, %B_1_3_5, %accumulator_3_5) : (memref<32xi32>, memref<64xi32>, memref<128xi32>) -> ()
      aie.use_lock(%lock_3_5_0, Release, 1)
      aie.use_lock(%lock_3_5_2, Release, 1)
    }
    func.call @store_half_even(%accumulator_3_5, %C_1_3_5, %shift) : (memref<128xi32>, memref<32xi32>, i32) -> ()
    aie.use_lock(%lock_3_5_5, Release, 1)
  }
  aie.end
} {link_with = "tandem_gemm.o", stack_size = 1024 : i32}
aie.runtime_sequence(%A: memref<768xi32>, %B: memref<1536xi32>, %C: memref<2048xi32>) {
  %task3 = aiex.dma_configure_task(%tile_0_0, S2MM, 0) {
    aie.dma_bd(%C : memref<2048xi32>, 0, 128, [<size = 2, stride = 16>, <size = 1, stride = 0>, <size = 32, stride = 32>, <size = 4, stride = 1>]) {bd_id = 2 : i32}
    aie.end
  } {issue_token = true, repeat_count = 1 : i32}
  aiex.dma_start_task(%task3)
  %task4 = aiex.dma_configure_task(%tile_0_0, MM2S, 0) {
    aie.dma_bd(%A : memref<768xi32>, 0, 96, [<size = 1, stride = 0>, <size = 3, stride = 4>, <size = 8, stride = 12>, <size = 4, stride = 1>]) {bd_id = 0 : i32}
    aie.end
  } {repeat_count = 1 : i32}
  aiex.dma_start_task(%task4)
  %task5 = aiex.dma_configure_task(%tile_0_0, MM2S, 1) {
    aie.dma_bd(%B : memref<1536xi32>, 0, 192, [<size = 2, stride = 16>, <size = 48, stride = 32>, <size = 1, stride = 1>, <size = 4, stride = 1>]) {bd_id = 1 : i32}
    aie.end
  } {repeat_count = 1 : i32}
  aiex.dma_start_task(%task5)
  %task9 = aiex.dma_configure_task(%tile_1_0, S2MM, 0) {
    aie.dma_bd(%C : memref<2048xi32>, 4, 128, [<size = 2, stride = 16>, <size = 1, stride = 0>, <size = 32, stride = 32>, <size = 4, stride = 1>]) {bd_id = 2 : i32}
    aie.end
  } {issue_token = true, repeat_count = 1 : i32}
  aiex.dma_start_task(%task9)
  %task10 = aiex.dma_configure_task(%tile_1_0, MM2S, 0) {
    aie.dma_bd(%A : memref<768xi32>, 96, 96, [<size = 1, stride = 0>, <size = 3, stride = 4>, <size = 8, stride = 12>, <size = 4, stride = 1>]) {bd_id = 0 : i32}
    aie.end
  } {repeat_count = 1 : i32}
  aiex.dma_start_task(%task10)
  %task11 = aiex.dma_configure_task(%tile_1_0, MM2S, 1) {
    aie.dma_bd(%B : memref<1536xi32>, 4, 192, [<size = 2, stride = 16>, <size = 48, stride = 32>, <size = 1, stride = 1>, <size = 4, stride = 1>]) {bd_id = 1 : i32}
    aie.end
  } {repeat_count = 1 : i32}
  aiex.dma_start_task(%task11)
  %task15 = aiex.dma_configure_task(%tile_2_0, S2MM, 0) {
    aie.dma_bd(%C : memref<2048xi32>, 8, 128, [<size = 2, stride = 16>, <size = 1, stride = 0>, <size = 32, stride = 32>, <size = 4, stride = 1>]) {bd_id = 2 : i32}
    aie.end
  } {issue_token = true, repeat_count = 1 : i32}
  aiex.dma_start_task(%task15)
  %task16 = aiex.dma_configure_task(%tile_2_0, MM2S, 0) {
    aie.dma_bd(%A : memref<768xi32>, 192, 96, [<size = 1, stride = 0>, <size = 3, stride = 4>, <size = 8, stride = 12>, <size = 4, stride = 1>]) {bd_id = 0 : i32}
    aie.end
  } {repeat_count = 1 : i32}
  aiex.dma_start_task(%task16)
  %task17 = aiex.dma_configure_task(%tile_2_0, MM2S, 1) {
    aie.dma_bd(%B : memref<1536xi32>, 8, 192, [<size = 2, stride = 16>, <size = 48, stride = 32>, <size = 1, stride = 1>, <size = 4, stride = 1>]) {bd_id = 1 : i32}
    aie.end
  } {repeat_count = 1 : i32}
  aiex.dma_start_task(%task17)
  %task21 = aiex.dma_configure_task(%tile_3_0, S2MM, 0) {
    aie.dma_bd(%C : memref<2048xi32>, 12, 128, [<size = 2, stride = 16>, <size = 1, stride = 0>, <size = 32, stride = 32>, <size = 4, stride = 1>]) {bd_id = 2 : i32}
    aie.end
  } {issue_token = true, repeat_count = 1 : i32}
  aiex.dma_start_task(%task21)
  %task22 = aiex.dma_configure_task(%tile_3_0, MM2S, 0) {
    aie.dma_bd(%A : memref<768xi32>, 288, 96, [<size = 1, stride = 0>, <size = 3, stride = 4>, <size = 8, stride = 12>, <size = 4, stride = 1>]) {bd_id = 0 : i32}
    aie.end
  } {repeat_count = 1 : i32}
  aiex.dma_start_task(%task22)
  %task23 = aiex.dma_configure_task(%tile_3_0, MM2S, 1) {
    aie.dma_bd(%B : memref<1536xi32>, 12, 192, [<size = 2, stride = 16>, <size = 48, stride = 32>, <size = 1, stride = 1>, <size = 4, stride = 1>]) {bd_id = 1 : i32}
    aie.end
  } {repeat_count = 1 : i32}
  aiex.dma_start_task(%task23)
  %task27 = aiex.dma_configure_task(%tile_0_0, S2MM, 0) {
    aie.dma_bd(%C : memref<2048xi32>, 1024, 128, [<size = 2, stride = 16>, <size = 1, stride = 0>, <size = 32, stride = 32>, <size = 4, stride = 1>]) {bd_id = 5 : i32}
    aie.end
  } {issue_token = true, repeat_count = 1 : i32}
  aiex.dma_start_task(%task27)
  %task28 = aiex.dma_configure_task(%tile_0_0, MM2S, 0) {
    aie.dma_bd(%A : memref<768xi32>, 384, 96, [<size = 1, stride = 0>, <size = 3, stride = 4>, <size = 8, stride = 12>, <size = 4, stride = 1>]) {bd_id = 3 : i32}
    aie.end
  } {repeat_count = 1 : i32}
  aiex.dma_start_task(%task28)
  %task29 = aiex.dma_configure_task(%tile_0_0, MM2S, 1) {
    aie.dma_bd(%B : memref<1536xi32>, 0, 192, [<size = 2, stride = 16>, <size = 48, stride = 32>, <size = 1, stride = 1>, <size = 4, stride = 1>]) {bd_id = 4 : i32}
    aie.end
  } {repeat_count = 1 : i32}
  aiex.dma_start_task(%task29)
  %task33 = aiex.dma_configure_task(%tile_1_0, S2MM, 0) {
    aie.dma_bd(%C : memref<2048xi32>, 1028, 128, [<size = 2, stride = 16>, <size = 1, stride = 0>, <size = 32, stride = 32>, <size = 4, stride = 1>]) {bd_id = 5 : i32}
    aie.end
  } {issue_token = true, repeat_count = 1 : i32}
  aiex.dma_start_task(%task33)
  %task34 = aiex.dma_configure_task(%tile_1_0, MM2S, 0) {
    aie.dma_bd(%A : memref<768xi32>, 480, 96, [<size = 1, stride = 0>, <size = 3, stride = 4>, <size = 8, stride = 12>, <size = 4, stride = 1>]) {bd_id = 3 : i32}
    aie.end
  } {repeat_count = 1 : i32}
  aiex.dma_start_task(%task34)
  %task35 = aiex.dma_configure_task(%tile_1_0, MM2S, 1) {
    aie.dma_bd(%B : memref<1536xi32>, 4, 192, [<size = 2, stride = 16>, <size = 48, stride = 32>, <size = 1, stride = 1>, <size = 4, stride = 1>]) {bd_id = 4 : i32}
    aie.end
  } {repeat_count = 1 : i32}
  aiex.dma_start_task(%task35)
  %task39 = aiex.dma_configure_task(%tile_2_0, S2MM, 0) {
    aie.dma_bd(%C : memref<2048xi32>, 1032, 128, [<size = 2, stride = 16>, <size = 1, stride = 0>, <size = 32, stride = 32>, <size = 4, stride = 1>]) {bd_id = 5 : i32}
    aie.end
  } {issue_token = true, repeat_count = 1 : i32}
  aiex.dma_start_task(%task39)
  %task40 = aiex.dma_configure_task(%tile_2_0, MM2S, 0) {
    aie.dma_bd(%A : memref<768xi32>, 576, 96, [<size = 1, stride = 0>, <size = 3, stride = 4>, <size = 8, stride = 12>, <size = 4, stride = 1>]) {bd_id = 3 : i32}
    aie.end
  } {repeat_count = 1 : i32}
  aiex.dma_start_task(%task40)
  %task41 = aiex.dma_configure_task(%tile_2_0, MM2S, 1) {
    aie.dma_bd(%B : memref<1536xi32>, 8, 192, [<size = 2, stride = 16>, <size = 48, stride = 32>, <size = 1, stride = 1>, <size = 4, stride = 1>]) {bd_id = 4 : i32}
    aie.end
  } {repeat_count = 1 : i32}
  aiex.dma_start_task(%task41)
  %task45 = aiex.dma_configure_task(%tile_3_0, S2MM, 0) {
    aie.dma_bd(%C : memref<2048xi32>, 1036, 128, [<size = 2, stride = 16>, <size = 1, stride = 0>, <size = 32, stride = 32>, <size = 4, stride = 1>]) {bd_id = 5 : i32}
    aie.end
  } {issue_token = true, repeat_count = 1 : i32}
  aiex.dma_start_task(%task45)
  %task46 = aiex.dma_configure_task(%tile_3_0, MM2S, 0) {
    aie.dma_bd(%A : memref<768xi32>, 672, 96, [<size = 1, stride = 0>, <size = 3, stride = 4>, <size = 8, stride = 12>, <size = 4, stride = 1>]) {bd_id = 3 : i32}
    aie.end
  } {repeat_count = 1 : i32}
  aiex.dma_start_task(%task46)
  %task47 = aiex.dma_configure_task(%tile_3_0, MM2S, 1) {
    aie.dma_bd(%B : memref<1536xi32>, 12, 192, [<size = 2, stride = 16>, <size = 48, stride = 32>, <size = 1, stride = 1>, <size = 4, stride = 1>]) {bd_id = 4 : i32}
    aie.end
  } {repeat_count = 1 : i32}
  aiex.dma_start_task(%task47)
  aiex.dma_await_task(%task3)
  aiex.dma_await_task(%task9)
  aiex.dma_await_task(%task15)
  aiex.dma_await_task(%task21)
  aiex.dma_await_task(%task27)
  aiex.dma_await_task(%task33)
  aiex.dma_await_task(%task39)
  aiex.dma_await_task(%task45)
}
